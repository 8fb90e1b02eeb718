"""One optimizer step over many parameters, on compressed states and split weights."""
