"""Codes of a codebook with scales by block, by tensor, or by row and column."""
