"""When workers should synchronise: barriers of elastic supersteps, chosen from predicted iteration ends (ElasticBSP)."""
