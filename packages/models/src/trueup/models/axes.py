"""The axes of the parameters that operators take whole, by the last parts of their names.

:mod:`trueup.core.ledger` reads them, so that its tables say Rq or Dn where an operator only knows a width.
"""

PARAMETER_AXES = {
    "weight": "H",  # every norm but the next two
    "q_norm.weight": "Rq",
    "kv_norm.weight": "R",
    "indexer.k_norm.weight": "Di",
    "w_uk": "N Dn R",
    "w_uv": "N R Dv",
    "mlp.bias": "E",
    "mlp.gate_up": "E H 2I",
    "mlp.down": "E I H",
}
