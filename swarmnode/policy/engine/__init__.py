"""What answers questions: requests go in, groups of completions come out, and in between the
weights may change."""
