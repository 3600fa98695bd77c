"""What to switch on, as options of the engine that will run it; and whether it does its work."""
