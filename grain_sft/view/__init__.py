"""view: what people look at. Rows of a step as text, on the terminal and as a page; a report of a whole config."""
