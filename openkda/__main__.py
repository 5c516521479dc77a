from openkda.cli import main

main()
