"""Several tokens a round: a drafter proposes, the target checks all proposals in one forward."""
