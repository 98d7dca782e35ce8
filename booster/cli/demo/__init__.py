"""`booster demo`: a first look, without files of one's own."""
