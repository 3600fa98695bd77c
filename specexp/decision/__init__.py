"""What to switch on: from committed results to a drafter, draft lengths and an engine's options."""
