"""Parameter updates.

Entry points: `update_rule` (AdamW or Muon with their schedule) and `outer` (outer averaging).
"""
