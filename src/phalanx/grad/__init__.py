"""From backward() to the mean gradient: flat memory, static groups, what is sent, and when."""
