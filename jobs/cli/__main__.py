"""`python -m headrace.jobs.cli`: the command line without its launcher script."""

from . import main

main()
