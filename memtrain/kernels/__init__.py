"""Ops in pairs: `<op>.py` (contract, pure-torch reference, dispatch) and `<op>_triton.py`."""
