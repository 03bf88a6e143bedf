"""Decides how a model is loaded on a machine: wishes, facts and machine in, a plan with reasons out. Arithmetic only."""
