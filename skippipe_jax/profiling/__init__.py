"""Measuring a cluster: links, stages, devices, as a case to plan for."""
