"""Trains on unchanged agents of other libraries: are their tokens recorded as they were sampled?"""
