from specexp.commands.app import main

main()
