"""The fault campaign: random handlers, random faults, and an oracle that says for each record what may be there now."""
