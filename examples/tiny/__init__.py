"""A generated world of small pictures, its captions and edits, and a checker of what is seen."""
