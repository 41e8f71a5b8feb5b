"""`make test` and `make test-slow` start Python with this module: it looks for garbage more rarely, and only among young objects.

The old objects are those of libraries and of other tests, which are many, and every training visits them several times.
Python still collects all of them now and then."""

import gc

_collect = gc.collect
gc.collect = lambda generation=1: _collect(generation)
gc.set_threshold(10_000, 10, 10)
