"""Which templates compute which segments: matches, heuristics, search and lock files."""
