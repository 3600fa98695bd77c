import sys

if not sys.flags.safe_path:  # the working folder last: no file there stands in for a module
    sys.path.append(sys.path.pop(0))

from specexp.commands.app import main

main()
