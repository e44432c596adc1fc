// How stages of a launch depend on each other, from the memory that they read and write: what goes by mail,
// and which counters are awaited. On the host.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "ops/decode_program/decode_program_kernel.cuh"
#include "tensor/tensor.h"

namespace sps::ops::decode_program {

// Rows that a stage reads or writes. Of a product x is the first that is read, y the first that is written; a
// sum's y is the second that is read. Of attention the results come first of what is written.
struct Touched {
  std::vector<Tensor> reads, writes;
};

class Links {
 public:
  // Of stages that follow each other, whose counters count up to `arrivals`, on so many blocks.
  Links(std::span<const Touched> touched, std::span<Record* const> records, std::span<const int32_t> arrivals,
        int blocks)
      : touched_(touched), records_(records), arrivals_(arrivals), blocks_(blocks) {}

  // Fills in what the stages await and where their mail lies, `mail_bytes` of it. Without mail, and where
  // something is read in another shape than it was written in or an order does not follow from what is waited
  // for, every stage waits for all of the one before.
  void make(bool mail) {
    const std::vector<Record> before = [&] {
      std::vector<Record> all;
      for (const Record* r : records_) all.push_back(*r);
      return all;
    }();
    if (mail && by_mail()) return;
    for (size_t n = 0; n < before.size(); ++n) *records_[n] = before[n];
    one_after_the_other();
  }
  int64_t mail_bytes = 0;

 private:
  // Where some rows lie within others.
  struct Within {
    int64_t row = -1, column = 0;
    explicit operator bool() const { return row >= 0; }
  };
  static Within within(const Tensor& whole, const Tensor& part) {
    if (whole.rows == 0 || whole.stride != part.stride || whole.dtype != part.dtype) return {};
    const auto size = int64_t(dtype_size(whole.dtype));
    const int64_t bytes = static_cast<const char*>(part.data) - static_cast<const char*>(whole.data);
    if (bytes < 0 || bytes % size != 0) return {};
    const int64_t row = bytes / size / whole.stride, column = bytes / size % whole.stride;
    if (row + part.rows > whole.rows || column + part.cols > whole.cols) return {};
    return {row, column};
  }
  static bool same(const Tensor& a, const Tensor& b) {
    return a.data == b.data && a.rows == b.rows && a.cols == b.cols && a.stride == b.stride &&
           a.dtype == b.dtype;
  }
  static bool overlap(const Tensor& a, const Tensor& b) {
    const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data); };
    const auto end = [&](const Tensor& t) {
      return begin(t) + size_t((t.rows - 1) * t.stride + t.cols) * dtype_size(t.dtype);
    };
    return a.rows > 0 && b.rows > 0 && begin(a) < end(b) && begin(b) < end(a);
  }
  // Results that may go by mail: a reader finds all of them, 16 bytes at a time. Attention's turned keys do
  // not.
  bool mails(size_t n, size_t which) const {
    if (records_[n]->stage.attends) {
      const Tensor& o = touched_[n].writes[0];
      return which == 0 && records_[n]->attention.head_dim % kFeatures == 0 && o.stride == o.cols;
    }
    const Product<bf16>& p = records_[n]->stage.product;
    return p.outputs % kFeatures == 0 && p.split % kFeatures == 0;
  }
  // The first byte of results as mail, and numbers from one row to the next.
  struct Place {
    int64_t first, stride;
  };
  Place place_of(size_t n, size_t which, const Within& at, size_t size) {
    Stage& s = records_[n]->stage;
    const Tensor& whole = touched_[n].writes[0];
    const int64_t stride = s.attends ? whole.cols : s.product.outputs;
    if (s.y_mail < 0) {
      s.y_mail = int32_t(mail_bytes), mail_bytes += whole.rows * stride * int64_t(size);
      if (s.attends) send_results(*records_[n], whole);
    }
    const int64_t column = at.column + (which == 1 ? s.product.split : 0);
    return {s.y_mail + (at.row * stride + column) * int64_t(size), stride};
  }
  static void send_results(Record& r, const Tensor& whole) {
    r.results = whole.data;
    for (int i = 0; i < kMaxQueryStreams; ++i) {
      decode::DeviceStream& stream = r.attention.stream[i];
      if (stream.q == nullptr) continue;
      const int64_t bytes = static_cast<const char*>(stream.o) - static_cast<const char*>(whole.data);
      if (bytes < 0 || bytes >= whole.rows * whole.stride * int64_t(sizeof(bf16))) continue;
      r.mail.o[i] = int32_t(r.stage.y_mail + bytes);
    }
  }
  static void receive(Record& r, const Tensor& t, const Place& from) {
    const auto first = int32_t(from.first);
    for (int i = 0; i < kMaxQueryStreams; ++i)
      if (r.attention.stream[i].q == t.data)
        r.mail.q[i] = first, r.attention.stream[i].q_stride = from.stride;
    for (int i = 0; i < kMaxKeySets; ++i) {
      decode::DeviceKeys& set = r.attention.set[i];
      if (set.k == t.data) r.mail.k[i] = first, set.k_stride = from.stride;
      if (set.v == t.data) r.mail.v[i] = first, set.v_stride = from.stride;
    }
  }

  // What of a product's results has been taken as mail. It makes a feature of all rows at the same time:
  // where each feature of some row has come, all has been read that the product reads.
  class Taken {
   public:
    Taken() = default;
    explicit Taken(const Product<bf16>& p) : rows_(p.rows), split_(p.split), features_(size_t(p.outputs)) {}
    // Columns of what is written first, or (which: 1) behind it.
    void add(const Tensor& t, int64_t column, size_t which) {
      if (features_.empty()) return;  // attention's
      const auto first = features_.begin() + column + (which == 1 ? split_ : 0);
      std::fill(first, first + t.cols, true);
      numbers_ += t.rows * t.cols;
    }
    bool all() const { return numbers_ > 0 && numbers_ == rows_ * int64_t(features_.size()); }
    bool every_feature() const { return numbers_ > 0 && std::ranges::count(features_, false) == 0; }

   private:
    int64_t rows_ = 0, split_ = 0, numbers_ = 0;
    std::vector<bool> features_;
  };

  bool by_mail() {
    const size_t n = records_.size();
    // When stage j has written anything, all of i is over: after[j][i]; when all of j is over: done[j][i].
    // Behind these n, whether all of i has read what it reads.
    std::vector<std::vector<bool>> after(n, std::vector<bool>(2 * n)), done = after;
    const auto over = [n](std::vector<bool>& stages, size_t i) { stages[i] = stages[n + i] = true; };
    std::vector<std::vector<bool>> reads_memory(n);  // by tensor that is read: not by mail
    size_t attention = n;                            // the last one
    for (size_t j = 0; j < n; ++j) {
      Stage& s = records_[j]->stage;
      const auto add = [](std::vector<bool>& to, const std::vector<bool>& more) {
        for (size_t k = 0; k < to.size(); ++k)
          if (more[k]) to[k] = true;
      };
      const auto waits_for = [&](size_t i) {
        over(after[j], i);
        add(after[j], after[i]), add(after[j], done[i]);
      };
      const auto add_to = [&](Stage::Await(&list)[kMostAwaited], size_t i) {
        for (Stage::Await& a : list) {
          if (a.arrivals > 0 && a.stage != int32_t(i)) continue;
          a = {int32_t(i), arrivals_[i]};
          return records_[i]->stage.arrives = true;
        }
        return false;
      };
      const auto await = [&](size_t i) {
        if (!add_to(s.awaited, i)) return false;
        waits_for(i);
        return true;
      };
      // Where attention writes keys: it is over when what it awaited last is.
      const auto await_late = [&](size_t i) {
        if (!s.attends || !add_to(s.late, i)) return false;
        over(done[j], i), add(done[j], after[i]), add(done[j], done[i]);
        return true;
      };
      s.arrives = false;
      // Attention's partial sums lie where those of the one before do.
      if (s.attends && attention != n && !await(attention)) return false;
      if (s.attends) attention = j;
      std::vector<Taken> taken(n);  // of each stage's results, by attention
      for (size_t i = 0; i < j; ++i) taken[i] = Taken(records_[i]->stage.product);
      for (size_t r = 0; r < touched_[j].reads.size(); ++r) {
        const Tensor& t = touched_[j].reads[r];
        reads_memory[j].push_back(true);
        // Back to who has written all of it.
        bool found = false;
        for (size_t i = j; i-- > 0 && !found;) {
          const std::vector<Tensor>& writes = touched_[i].writes;
          for (size_t w = 0; w < writes.size() && !found; ++w) {
            if (!overlap(writes[w], t)) continue;
            const Within at = within(writes[w], t);
            if (!mails(i, w)) {
              if (!after[j][i] && !await(i)) return false;
              found = bool(at);
              continue;
            }
            if (!at) return false;
            const Place from = place_of(i, w, at, dtype_size(t.dtype));
            if (s.attends)
              receive(*records_[j], t, from), taken[i].add(t, at.column, w);
            else if (from.stride != t.cols)
              return false;  // products read whole rows
            else
              (r == 0 ? s.x_mail : s.old_mail) = int32_t(from.first);
            reads_memory[j][r] = false, found = true;
            // All of a row is read by every block of a product; by attention a part of it.
            if (!s.attends && r == 0 && t.rows == touched_[i].writes[0].rows)
              waits_for(i);
            else
              add(after[j], after[i]);
          }
        }
      }
      // Blocks go through the stages in order: when all have been here, products before are over.
      done[j] = after[j];
      for (size_t i = 0; i < j; ++i) {
        if (taken[i].all()) over(done[j], i);
        if (taken[i].every_feature()) done[j][n + i] = true;
      }
      if (!s.attends && arrivals_[j] == blocks_)
        for (size_t i = 0; i < j; ++i)
          if (!records_[i]->stage.attends) over(done[j], i);
      for (size_t i = 0; i < j; ++i)
        for (size_t of_j = 0; of_j < touched_[j].writes.size(); ++of_j) {
          const Tensor& t = touched_[j].writes[of_j];
          const auto in_order = [&](size_t what) { return after[j][what] || (of_j > 0 && await_late(i)); };
          const std::vector<Tensor>& writes = touched_[i].writes;
          for (size_t w = 0; w < writes.size(); ++w)
            if (overlap(writes[w], t)) {
              if (mails(i, w) && same(writes[w], t))
                (w == 0 ? records_[i]->stage.keeps : records_[i]->stage.keeps_rest) = false;
              else if (!in_order(i))
                return false;
            }
          for (size_t r = 0; r < touched_[i].reads.size(); ++r)
            if (reads_memory[i][r] && overlap(touched_[i].reads[r], t) && !in_order(n + i)) return false;
        }
    }
    return true;
  }

  void one_after_the_other() {
    mail_bytes = 0;
    for (size_t n = 0; n < records_.size(); ++n) {
      Stage& s = records_[n]->stage;
      s.arrives = true;
      if (n > 0) s.awaited[0] = {int32_t(n - 1), arrivals_[n - 1]};
    }
  }

  std::span<const Touched> touched_;
  std::span<Record* const> records_;
  std::span<const int32_t> arrivals_;
  int blocks_;
};

}  // namespace sps::ops::decode_program
