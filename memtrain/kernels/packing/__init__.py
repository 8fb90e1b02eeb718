"""Codes of 1 to 8 bits packed to the bit."""
