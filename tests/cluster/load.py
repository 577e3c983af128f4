"""`python -m tests.cluster.load URL ROUNDS`: traffic from a host, a line of JSON for each round."""

from __future__ import annotations

import hashlib
import json
import sys

from tests.support import acceptance
from tests.support.traffic import PROMPTS, ask

MAX_TOKENS = 40


def main(url: str, rounds: int) -> None:
    for _ in range(rounds):
        answers = ask(url, PROMPTS * 2, streams=4, max_tokens=MAX_TOKENS)
        errors = [answer.error for answer in answers if not answer.ok]
        alpha = acceptance.alpha(acceptance.counts([a for a in answers if a.ok]))
        tokens = json.dumps([list(answer.token_ids) for answer in answers])
        digest = hashlib.sha256(tokens.encode()).hexdigest()
        print(json.dumps({"errors": errors, "alpha": alpha, "digest": digest}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
