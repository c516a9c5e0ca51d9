// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors on disk: dtypes, metadata and checkpoint containers.
//!
//! This crate parses and lays out checkpoints: safetensors files, sharded checkpoints, and `.ts`
//! containers. It does no I/O: it opens no files, starts no threads and uses no devices. A
//! [`CatalogReader`] requests byte ranges and the caller feeds them, so the same parser works for
//! files, object stores and sockets.
//!
//! ```
//! use ts_format::{CatalogReader, Dtype};
//!
//! // A safetensors file in memory.
//! let header = br#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
//! let mut file = (header.len() as u64).to_le_bytes().to_vec();
//! file.extend_from_slice(header);
//! file.extend_from_slice(&[0; 8]);
//!
//! let mut reader = CatalogReader::single("model.safetensors");
//! while let Some(need) = reader.need() {
//!     let end = (need.offset + need.len).min(file.len() as u64) as usize;
//!     reader.feed(&file[need.offset as usize..end], file.len() as u64)?;
//! }
//! let catalog = reader.finish()?;
//! let tensor = catalog.tensor("w").expect("listed in the header");
//! assert_eq!((tensor.dtype(), tensor.range().offset), (Dtype::F32, 8 + header.len() as u64));
//! # Ok::<(), ts_format::Error>(())
//! ```
//!
//! # Invariants
//! - Every [`ByteRange`] of a [`Catalog`] is [virtual](ByteRange::VIRTUAL_START) or lies within its
//!   file. The length of the file is measured when its header is read.
//! - The ranges of a tensor have exactly as many bytes as its dtype and shape require.
//! - Sizes are checked against the length of the file before memory is allocated.
//! - No content of a file is ever executed.
#![deny(unsafe_code)]

mod catalog;
mod codec;
mod digest;
mod dtype;
mod error;
mod frame;
mod index;
mod json;
mod meta;
mod metadata;
mod range;
mod reader;
mod safetensors;
mod sharded;
#[allow(unsafe_code)]
mod simd;
mod split;
mod superblock;
mod table;
mod writer;

pub use catalog::{Catalog, ChunkPart, FileEntry, Tensor, TensorEntry};
pub use codec::{Codec, Compression, DecodeError, Encoded, Encoder, Scratch, decode_chunk};
pub use digest::{CHUNK_LEN, Digest};
pub use dtype::Dtype;
pub use error::{Error, ErrorKind};
pub use frame::{HuffmanCode, MAX_CODE_BITS, Run, RunContent};
pub use index::MAX_RANK;
pub use meta::TensorMeta;
pub use metadata::Metadata;
pub use range::{ByteRange, FileId};
pub use reader::{CatalogReader, ReadRequest};
pub use safetensors::{MAX_HEADER_LEN, SafetensorsLayout};
pub use sharded::{MAX_INDEX_LEN, shard_index};
pub use split::{SplitBlock, SplitLayout, SplitPlane};
pub use superblock::MAGIC;
pub use table::Chunk;
pub use writer::{
    CheckpointSpace, ContainerTail, ContainerWriter, CopyRange, fingerprint, tensor_fingerprint,
};
