"""Optimizer states as payloads, around any torch optimizer."""
