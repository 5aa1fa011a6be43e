"""Parameter updates: AdamW or Muon with their schedule, and outer averaging.

Entry points: `update_rule` and `outer`.
"""
