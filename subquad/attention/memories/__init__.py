"""What tokens write, and how queries read it: the memories that mechanisms keep (`subquad.attention.past`)."""
