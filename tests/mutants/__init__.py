"""Mutation check: do the tests fail when one line of the package is wrong?"""
