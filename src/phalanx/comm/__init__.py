"""The running side: how ranks find each other, what they send, and what happens when one of them fails."""
