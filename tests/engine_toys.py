"A plugin with an engine that needs a process of its own, for tests."

import os
import time

from mixsd_nb.models import ENGINES, EngineSpec
from mixsd_nb.models.engines import HFEngine

ENGINES.add(EngineSpec("apart", "transformers in another process", "engine_toys:Apart", own_process=True))
HANG, FAIL, DIE, REFUSE = 3, 4, 5, 6  # first tokens of prompts that are scored in a special way


class Apart(HFEngine):
    mismatches = ()

    def score(self, pairs):
        for (first, *_), _ in pairs:
            if first == HANG: time.sleep(600)
            if first == FAIL: raise KeyError("two\nlines")
            if first == DIE: os.abort()
            if first == REFUSE: raise ValueError(f"a prompt must not begin with {first}")
        return super().score(pairs)

    def stream(self, queue, **options):
        "As transformers, with an audit that objects to every completion whose ids have an even sum."
        written = []
        for request, completion in super().stream(queue, **options):
            written.append((request, completion.ids))
            yield request, completion
        self.confirm(written)

    def confirm(self, written, **options):
        self.mismatches = [*self.mismatches, *((r.tag, [0]) for r, ids in written if sum(ids) % 2 == 0)]
