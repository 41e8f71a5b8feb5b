"""Tests, notebooks and the site look for garbage more rarely, and among young objects only.

The old objects are those of libraries and of other tests, which are many, and every training visits them several times.
Python still collects all of them now and then."""

import gc

collect_all = gc.collect
gc.collect = lambda generation=1: collect_all(generation)
gc.set_threshold(10_000, 10, 10)
