"""From backward() to the mean gradient: flat memory, static groups, what travels, and when."""
