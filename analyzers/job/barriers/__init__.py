"""When workers should synchronise: barriers of elastic supersteps (ElasticBSP)."""
