"""Count the stated answers that are found and read, by the style in which they are written."""
