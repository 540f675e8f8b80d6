"""The running side: who the ranks are, what they say to each other, and what happens when one of them falls."""
