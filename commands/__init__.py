"""One file per subcommand: parse, call one analyzer, print."""
