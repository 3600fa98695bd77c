"""How the shipped models were made: their text, their recipes, their training. See README.md."""
