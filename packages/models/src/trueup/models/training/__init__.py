"""How the embedded nano checkpoint was made: corpus, tokenizer, differentiable twin, training, report.

Nothing in serving imports this package.  ``python -m trueup.models.training`` is the command.
"""
