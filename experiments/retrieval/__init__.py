"""Retrieval: a number is read, much else after it, and then it is asked for; answered by generation through a cache."""
