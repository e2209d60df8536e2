"""Nadaraya-Watson kernel regression: attention whose only parameter is a bandwidth."""
