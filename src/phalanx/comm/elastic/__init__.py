"""A world that outlives its ranks: begin with docs/elastic.md, then agreement.py."""
