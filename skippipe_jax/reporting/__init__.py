"""Pictures and pages of what runs measured."""
