"""The open inference protocol over gRPC, by the messages and the service that tritonclient's wheel has."""
