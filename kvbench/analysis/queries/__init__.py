"""`kvbench analyze queries`: a vector autoregression of the queries of an answer."""
