"""Clusters that train one model together and share only a slow link."""
