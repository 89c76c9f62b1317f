"""Learns from whatever has arrived. The only folder with torch and DeepSpeed."""
