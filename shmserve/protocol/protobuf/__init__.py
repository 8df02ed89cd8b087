"""The protobuf wire format without generated classes: ModelInfer's messages, tensors uncopied."""
