"""24 questions that show whether tool calls work through an endpoint: the right decision, the right arguments, the right protocol.

question.py: what is asked and expected; score.py: three points a question; endpoint.py: who is asked over HTTP; replay.py: stored
model outputs in place of a model; bench.py: the whole run.
"""
