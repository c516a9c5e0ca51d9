// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors on disk: dtypes, metadata and checkpoint containers.
//!
//! This crate knows what the bytes of a checkpoint mean. It refuses to fetch them: it opens no
//! file, starts no thread and knows no device. A [`CatalogReader`] says which bytes it wants next
//! and is fed them, so the same parser serves a file, an object store and a socket.
//!
//! ```
//! use ts_format::{CatalogReader, Dtype};
//!
//! // One safetensors file, held in memory here.
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
//! let tensor = catalog.tensor("w").expect("it is in the header");
//! assert_eq!((tensor.dtype(), tensor.range().offset), (Dtype::F32, 8 + header.len() as u64));
//! # Ok::<(), ts_format::Error>(())
//! ```
//!
//! # Invariants
//! - Every [`ByteRange`] of a [`Catalog`] lies inside the file that it names, as long as that file
//!   was when its header was read; the ranges of a tensor add up to exactly its dtype times its
//!   shape.
//! - Nothing is allocated before its size was checked against the file's, and nothing in a file is
//!   evaluated.
//!
//! # Features
//! None.
#![deny(unsafe_code)]

mod catalog;
mod codec;
mod digest;
mod dtype;
mod error;
mod index;
mod json;
mod meta;
mod reader;
mod safetensors;
mod sharded;
#[allow(unsafe_code)]
mod simd;
mod split;
mod superblock;
mod table;
mod writer;

pub use catalog::{ByteRange, Catalog, ChunkPart, FileEntry, FileId, Tensor, TensorEntry};
pub use codec::{Codec, Compression, DecodeError, Encoded, Encoder, Scratch, decode_chunk};
pub use digest::{CHUNK_LEN, Digest};
pub use dtype::Dtype;
pub use error::{Error, ErrorKind};
pub use index::MAX_RANK;
pub use meta::TensorMeta;
pub use reader::{CatalogReader, Need};
pub use safetensors::{MAX_HEADER_LEN, SafetensorsLayout};
pub use sharded::{MAX_INDEX_LEN, shard_index};
pub use superblock::MAGIC;
pub use table::Chunk;
pub use writer::{
    CheckpointRoom, ContainerEnds, ContainerWriter, Move, fingerprint, tensor_fingerprint,
};
