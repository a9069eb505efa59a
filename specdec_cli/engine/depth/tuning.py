"""The adaptive policy's constants: unit, meaning and reason of each.

(t) marks a constant without which, or with a very different value, a test in `tests/engine/depth` fails. Those tests
run on simulated clocks. (b) marks one that they do not need: only `benchmarks/adaptive.py`, on a quiet machine, can
tell what it gains.
"""

from __future__ import annotations

# Exploring: steps with a k that is not the best, to measure what it costs and gives.

EXPLORATION_SHARE = 0.004
"""Share of the time; what exploring may lose. Never being much slower than plain decoding rests on it. (t)"""
FIRST_K = 1
"""Tokens; the first k measured, where a slow or bad draft shows itself at the lowest price. (t)"""
DEEPER_FACTOR = 2
"""Times the deepest k tried; a k beyond is not predicted: a line through measurements does not reach that far. (t)"""
FIRST_LOOK_ROWS = 8
"""Rows; a first look drafts for so many. A draft reads a large batch's prompts for long; fewer rows show little. (t)"""
FIRST_LOOK_PLAIN_STEPS = 2
"""Plain steps; what a first look is expected to lose, besides the time to decide about it. (t)"""
FIRST_LOOK_SHARE = 0.02
"""Share of the time seen and still asked for; what a first look may cost, so that short runs go without one. (t)"""
FIRST_LOOK_STEPS_LEAST = 2
"""Steps; a first look is not ended earlier, for its first step has the draft's first forward and a prompt in it. (t)"""
FIRST_LOOK_DEAR = 4
"""Plain steps; a first look whose steps all took longer ends, and the rest waits for more time to be seen. (t)"""
FIRST_LOOK_PLAIN_KNOWN = 3
"""Plain steps; measured before a first look, for beside one interrupted step any draft looks good. (t)"""
LOOK_STEPS = 3
"""Steps; the length of a look. In the first a draft reads what it did not draft; the others make a cost trusted. (t)"""
LOOK_STEPS_MOST = 8
"""Steps; the length of a look whose steps each lose less than deciding on it. (t)"""
PLAIN_LOOK_STEPS = (8, 3, 1)
"""Steps; lengths of a look at plain decoding, of which the longest affordable one is taken. (t)"""
SETTLED_STEPS = 8
"""Plain steps; after so many in a row a step is a measure, for caches hold the target again. Of fewer, half are. (t)"""
STEPS_BETWEEN_LOOKS = 8
"""Steps; from one look to the next. (t)"""
STEPS_BETWEEN_PLAIN_LOOKS = 128
"""Steps; between looks at plain decoding while drafting. Halved for each step that PLAIN_KNOWN still lacks. (t)"""
PLAIN_KNOWN = 7
"""Plain steps; as many as these are measured until looks at plain decoding become rare. (t)"""
GRACE_STEPS = 1
"""Plain steps; what exploring may lose before its share of the time has grown to as much. (t)"""
SLOWEST_FACTOR = 3
"""Times the expected seconds; the most that exploring is charged with for a step in which a draft first reads. (t)"""

# Deciding.

MARGIN_TO_BEGIN, MARGIN_TO_KEEP = 0.04, 0.02
"""Shares of plain decoding's rate; a smaller gain does not begin drafting, or does not keep it on. (t)"""
REPAID_WITHIN_STEPS = 32
"""Steps; within so many, drafting has to save what the draft reads before it begins. (b)"""
HOPELESS_SHARE = 0.8
"""Share of plain decoding's rate; a draft that gives less at every k is not tried for each new request. (t)"""
HELD_STEPS, HELD_STEPS_MOST = 8, 96
"""Steps; how long a decision to draft holds, because deciding takes time. At least (t), and at most (b)."""
HELD_AT_REST_STEPS, HELD_AT_REST_STEPS_MOST = 16, 2048
"""Steps; how long a decision to draft nothing holds: until a look is allowed, but not for ever. (t)"""
HELD_WHERE_ROWS_ENDED_MOST = 24
"""Steps; how long a decision still holds once some of its rows ended, for fewer rows may have another best k. (b)"""
STEPS_SEEN_FACTOR = 8
"""Times; so many times the steps that a decision to draft holds for lie behind it: little is known early. (t)"""
LEARNED_STEPS = 32
"""Steps; of a decision's, the last ones tell what they cost. To learn from every one takes time. (b)"""

# Costs of steps.

INTERRUPTED_FACTOR = 1.5
"""Times the expected seconds; a longer step counts as interrupted, and for only so many. (t)"""
COST_MEMORY_STEPS = 64
"""Steps; what a mean of seconds looks back on. (t)"""
OLD_AFTER_STEPS, OLD_MEMORY_STEPS = 32, 8
"""Steps; a mean without a measurement for the first number of them counts for the second at most. (t)"""
PACE_MEMORY_STEPS = 8
"""Steps; what the machine's pace looks back on. (t)"""
TRUSTED_MEASUREMENTS = 2
"""Measurements; a cost needs so many, for one alone may have been interrupted. (t)"""
EXACT_ROWS = 8
"""Rows; up to so many, each number has costs of its own, and beyond three binary digits of it. (b)"""
ALIKE_ROWS_FACTOR = 2
"""Times as many rows, or as few; costs are not borrowed from farther away before a look. (t)"""
DRAFTED_GRAIN = 0.5
"""Drafted tokens a row; numbers within half of it share a measurement. (t)"""
DRAFT_SHARE_MOST = 0.9
"""Share of a step; no more of it is a draft's part, however the clocks were read: seconds stay finite. (b)"""
SLOPE_MEMORY_STEPS = 512
"""Steps; what the cost of a context's token looks back on. (b)"""
SLOPE_DOUBT_TOKENS = 1024.0
"""Tokens; half of a slope is believed once squares of what contexts differ by sum up to its square. (t)"""
CONTEXT_SPEED_UP_MOST = 4
"""Times; no context makes a step faster than that: however wrong a slope is, seconds stay positive. (b)"""

# Acceptance.

UNSEEN_ACCEPTANCE = 0.5
"""Probability; that a drafted token is accepted, while nothing was seen of a drafter. (b)"""
PRIOR_STEPS = 4.0
"""Steps; what a prior counts for beside what was seen. (t)"""
REQUEST_MEMORY_STEPS = 64
"""Steps; what a request's acceptance looks back on. (b)"""
POOL_MEMORY_STEPS = 256
"""Steps; what the acceptance of all of a drafter's requests looks back on. (t)"""
