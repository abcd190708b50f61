"""Commands that use the library from end to end, and the parts they share."""
