"""Random bits from counters."""
