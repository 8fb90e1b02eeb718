"""Min/max group quantisation."""
